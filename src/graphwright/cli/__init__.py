"""The command line: commands, TARGET, and the files it writes.

It turns words into calls of the library and shows what they return. What a user of the library
needs belongs below. Begin with main.
"""
