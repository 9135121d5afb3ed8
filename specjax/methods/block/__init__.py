"""Block drafters: DFlash, DFlash2 and DSpark."""
