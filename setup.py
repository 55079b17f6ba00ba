"""Two packages: ``oslo_models`` from the root, and ``oslo_kernels`` from ``kernels/``, which is no package itself."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
version: dict[str, str] = {}
exec((ROOT / "oslo_models" / "_version.py").read_text(), version)  # importing the package would need torch
readme = ROOT / "README.md"

setup(
    name="oslo-models",
    version=version["__version__"],
    description="A model zoo of pre-parallelized Hugging Face architecture classes",
    long_description=readme.read_text() if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["oslo_models", "oslo_models.*"]),
        *find_packages("kernels", include=["oslo_kernels", "oslo_kernels.*"]),
    ],
    package_dir={"oslo_kernels": "kernels/oslo_kernels"},
    package_data={"oslo_kernels": ["csrc/*"]},
    install_requires=[
        "torch>=2.11",
        "transformers>=5.17,<6",
        "huggingface_hub",
        "numpy",
        "safetensors>=0.8",
        "tqdm",
    ],
    extras_require={
        # peers, or what they need: accelerate is for the tensor parallelism of transformers
        "bench": ["accelerate", "datasets"],
        "data": ["pyarrow", "zstandard"],  # to read .parquet and .zst
        "deepspeed": ["deepspeed>=0.19,<0.20"],
        "demo": ["matplotlib"],
        "dev": [
            "datasets",
            "hypothesis",
            "megatron-core",
            "mypy",
            "pytest",
            "pytest-xdist",
            "ruff",
            "setuptools",
            "triton>=3.6; sys_platform == 'linux'",
            "wheel",
            "zstandard",
        ],
    },
    entry_points={"console_scripts": ["oslo-models = oslo_models.cli:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
