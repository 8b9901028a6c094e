"""The other hosts of a job, as a Trainer sees them.

Entry point: ``discovery.find_hosts``. How hosts find and authenticate each other is in
``launch.rendezvous`` and ``launch.security``; the tensors of a step travel by ``comm``.
"""
