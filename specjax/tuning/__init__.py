"""What a drafter's candidates are worth, and which token tree of them is fastest here."""
