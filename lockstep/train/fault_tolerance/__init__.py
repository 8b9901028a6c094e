"""Going on after a process or a host was lost.

Entry points: ``restarting`` (a lost process of this host), ``lost_hosts`` (a lost host) and
``copies`` (of the training, for memory, another host and a folder). Files on disk are
``train.checkpointing``; noticing a loss is ``train.runtime.helper_watchdog`` and ``launch.health``.
"""
