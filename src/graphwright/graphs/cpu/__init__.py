"""The recorder of the CPU: a tape of operations in one arena. Begin with recorder."""
