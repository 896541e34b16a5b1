"""What the services share: the rule (specdec), the wire (rpc) and the models (engine)."""
