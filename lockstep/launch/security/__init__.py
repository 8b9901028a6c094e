"""The job's secret and the handshake that proves it.

Entry point: ``handshake``. Encryption of what follows is in ``lockstep.channel``.
"""
