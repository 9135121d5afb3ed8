"""The packages of the wheel: `specjax`, `train`, and `configs/` as `specjax.configs`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["specjax*", "train*"]), "specjax.configs"],
    package_dir={"specjax.configs": "configs"},
)
