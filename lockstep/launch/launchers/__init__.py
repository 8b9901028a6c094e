"""Starts a script on several hosts: ssh, Slurm, Kubernetes, Ray, or this host alone.

Entry point: ``multi_host_run``. ``supervisor`` starts a script again after a failure.
"""
