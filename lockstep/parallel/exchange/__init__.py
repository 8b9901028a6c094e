"""The exchange between the ranks of a Plan in a step, and the messages that control it.

Entry points: ``engine`` (a rank's end of the exchange) and ``control``. ``comm`` moves the bytes.
"""
