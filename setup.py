"""Package metadata: everything an installation needs, in one place."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "miles_rollout/__init__.py").read_text())
SERVE = ["fastapi>=0.115", "uvicorn>=0.30", "httpx>=0.27"]  # rewards behind HTTP
OCR = ["rapidocr>=3.10", "onnxruntime>=1.20", "rapidfuzz>=3.9"]  # models inside the package
CLAP = ["soxr>=0.5"]
SPEECH = ["speechmos>=0.0.1.1", "onnxruntime>=1.20", "soxr>=0.5"]  # the model inside the package
DATASETS = "datasets>=5.0"  # prompts in parquet files and on the Hugging Face hub
VIDEO = "av>=14.0"  # PyAV, to write videos: only runs of video models need it

setup(
    name="miles-rollout",
    version=VERSION.group(1),
    description="Runs diffusers pipelines in the trainer's process and turns them into RL rollouts",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["miles_rollout*", "trainers*"]),
    package_data={"miles_rollout": ["py.typed", "testing/data/*"], "trainers": ["py.typed"]},
    install_requires=[
        "torch>=2.13",
        "diffusers>=0.42.1",
        "transformers>=5.0",
        "peft>=0.20",
        "safetensors>=0.8",
        "numpy>=2.0",
        "pillow>=10.4",
        "pydantic>=2.12",
        "packaging>=23",
        "pyyaml>=6.0.1",
        "tqdm>=4.66",
        "wandb>=0.20",
    ],
    extras_require={
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.15",
            "mypy>=1.15",
            "types-PyYAML",
            "types-tqdm",
            "import-linter>=2.1",
            "jaxtyping>=0.3",
            "beartype>=0.20",
            VIDEO,
            DATASETS,
            *SERVE,
            *OCR,
            *CLAP,
            *SPEECH,
        ],
        "ocr": OCR,
        "clap": CLAP,
        "speech": SPEECH,
        "video": [VIDEO],
        "datasets": [DATASETS],
        "remote": ["httpx>=0.27"],
        "serve": SERVE,
        "plots": ["matplotlib>=3.9"],
    },
    classifiers=[
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
