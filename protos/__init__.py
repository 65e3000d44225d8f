"""Slipstream's wire format: slipstream.proto and the stubs generated from it."""
