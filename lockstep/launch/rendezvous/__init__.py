"""How the hosts of a job find each other, and the connections between them.

Entry points: ``host_rendezvous`` and ``control_group``. Every connection is authenticated first
(``launch.security``).
"""
