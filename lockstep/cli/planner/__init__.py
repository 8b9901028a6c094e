"""The command ``lockstep plan``: ``plan_command``, with the ranked table in ``plan_ranking``."""
