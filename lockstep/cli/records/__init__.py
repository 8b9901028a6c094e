"""Commands about records of training loops. A file has one command, or what it needs.

Nothing here records: ``lockstep.record`` does, in the user's script.
"""
