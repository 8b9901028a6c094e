"""What a run did, and how it compares with what was predicted: text, and one HTML page.

Entry points: ``run_report.report_of`` and ``html_page.html_of``. Not here: how a run ended
(``lockstep doctor``), and the record itself (``train.fault_tolerance.run_record``).
"""
