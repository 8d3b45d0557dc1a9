"""serve(): models behind the Open Inference Protocol, their requests joined into batches.

What belongs here: the protocol over HTTP and gRPC, joining requests and cutting answers apart, the
queue, metrics. What does not: running a model fast, which the rooms below do. Read `runner.py`
first, the way of one request, then `joining.py` and `batching.py`.
"""
