import json

from trainers.summary import summarise


def _write(folder, rewards, evaluations):
    lines = [{"iteration": i, "rollout/reward/mean": r} for i, r in enumerate(rewards)]
    lines.append({"iteration": len(rewards)})
    for iteration, value in evaluations.items():
        lines[iteration]["eval/reward/mean"] = value
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def test_both_ends_and_their_distance_in_standard_errors(tmp_path):
    """Means 0.2 and 0.6; both variances are 0.02, so the error of the difference is 0.2 / sqrt(2)."""
    _write(tmp_path, [0.1, 0.3, 0.5, 0.7], {0: 0.25, 2: 0.75, 4: 0.5})
    report = summarise(tmp_path)
    assert "first 2 iterations 0.200, last 2 0.600, +0.400 (+2.8 standard errors)" in report
    assert "0.250 before, 0.500 after, +0.250; best 0.750 at iteration 2" in report
    assert str(tmp_path / "metrics.jsonl") in report


def test_one_iteration_has_no_trend(tmp_path):
    _write(tmp_path, [0.5], {})
    assert summarise(tmp_path) == f"  {tmp_path / 'metrics.jsonl'}"
