"""save() and load(): what tuning found, with its evidence, for other processes."""

from .loading import load as load
from .saving import save as save
