"""diagnose(): compare a graph's replay with eager, and name the operation where they part.

A fault of the device is looked for in a child process, since it ends the use of the device by the
process that meets it. Begin with diagnosing; comparison finds the operation, faults the fault.
"""

from .result import Diagnosis as Diagnosis
