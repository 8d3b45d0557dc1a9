"""The command line: what a user of the library does not need. Begin with main."""
