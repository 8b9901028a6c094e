"""Starts a script on several hosts: by ssh, Slurm, Kubernetes, Ray, or on this host only.

Entry point: ``multi_host_run``. ``supervisor`` restarts a script after a failure.
"""
