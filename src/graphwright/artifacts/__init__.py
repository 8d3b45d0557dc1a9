"""The tuned module and its file: TunedModule, save() and load().

Measuring and choosing belong to tuning. Begin with tuned_module, then saving and loading.
"""

from .loading import load as load
from .saving import save as save
