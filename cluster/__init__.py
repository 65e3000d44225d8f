"""Everything around the core: configuration, bring-up, the gRPC front end, the client and the command line."""
