"""profile(): what bounds a call, in one verdict, and the most that each remedy can give.

It runs the call and captures nothing. Begin with profiler; verdict decides from figures alone, and
remedies predicts from them. roofs holds what the machine can do at most, which is measured once.
"""

from .profile import Profile as Profile
from .profiler import profile as profile
from .roofs import Roofs as Roofs
from .verdict import Cause as Cause
from .verdict import Verdict as Verdict
