"""Memory that the processes of one host share, and waiting in it.

Entry points: ``shared_region`` and ``status_board`` (barriers and short messages).
"""
