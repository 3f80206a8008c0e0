from setuptools import setup

ROOMS = ("configuration", "modeling", "processing", "hub_cards")

setup(
    # The rooms lie flat in the repository and become subpackages of gridtower when installed.
    packages=["gridtower", *(f"gridtower.{room}" for room in ROOMS)],
    package_dir={"gridtower": "gridtower", **{f"gridtower.{room}": room for room in ROOMS}},
    package_data={"gridtower.hub_cards": ["*.md", "default_model/*"]},
    install_requires=[
        "transformers>=5.24,<6",
        "torch>=2.6",
        "torchvision>=0.21",
        "accelerate>=1.1",
        "safetensors>=0.5",
        "huggingface_hub>=1.0",
        "pillow>=10.0",
        "av>=12.0",
        "tqdm>=4.60",
        "filelock>=3.12",
    ],
    extras_require={
        "train": ["peft>=0.17", "trl>=1.0", "scikit-learn>=1.4", "tensorboard>=2.14", "pyyaml>=6.0"],
        "embed": ["pyarrow>=15.0"],
        "ray": ["ray[data]>=2.40"],
        "bench": ["matplotlib>=3.8"],
        "test": [
            "pytest>=8.0",
            "hypothesis>=6.100",
            "parameterized>=0.9",
            "scikit-learn>=1.4",
            "peft>=0.17",
            "trl>=1.16",
            "pyarrow>=15.0",
            "ray[data]>=2.40",
            "ruff>=0.6",
        ],
    },
    entry_points={"console_scripts": ["gridtower=gridtower.command_line:main"]},
)
