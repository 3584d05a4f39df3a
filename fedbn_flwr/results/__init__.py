"""The results of a run: the ledger of messages, the run folder and the report."""
