"""Makers: pure functions from LayerGraph, Cluster and batch size to a Plan.

Entry point: ``data_parallel``; the other modules add hosts, compression, averaging and servers. The
maker of pipelines is ``plan.pipeline.pipelines``.
"""
