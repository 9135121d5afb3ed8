"""What a run of training did, drawn and measured."""
