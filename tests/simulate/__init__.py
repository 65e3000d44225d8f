"""The parts of the simulated world: toy model, fake workers, ledger, front ends, weather."""
