"""graph(): a call, its signature, maybe a bucket, then a graph or eager; and the counts of it all.

How graphs are recorded belongs to graphs. Begin with graphed_callable.
"""
