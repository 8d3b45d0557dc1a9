"""The command line: commands, targets, and the files that commands write.

It turns arguments into calls of the library and shows the results. What a user of the library needs
belongs in other rooms. Begin with main.
"""
