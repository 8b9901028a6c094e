"""Parameter servers with a staleness: ranks that update beside ranks that compute.

Entry points: ``async_worker`` (both roles on one host) and ``remote_worker`` (a worker on another
host). Synchronous servers (``staleness=0``) are an ordinary ``parallel.worker``.
"""
