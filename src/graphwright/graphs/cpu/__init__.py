"""The CPU recorder: a tape of operations in one arena. Begin with recorder."""
