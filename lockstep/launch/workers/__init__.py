"""Helper processes of one host: started, called and ended.

Entry point: ``team``. Helpers are forks of a warm interpreter (``fork_server``) or processes that a
launcher started (``external_workers``). What they run is up to the caller.
"""
