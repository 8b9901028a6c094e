"""What the ranks of a Plan share in a step, and the messages that control it.

Entry points: ``engine`` (a rank's end of the exchange) and ``control``. How bytes move is in
``comm``.
"""
