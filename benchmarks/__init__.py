"""Performance claims, as paired ratios: one command each, figures in RESULTS.md."""
