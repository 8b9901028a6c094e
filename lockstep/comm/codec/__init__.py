"""Messages between hosts as bytes, without pickle.

Entry point: ``message_codec``.
"""
