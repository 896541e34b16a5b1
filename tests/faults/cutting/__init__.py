"""Workers that cut their streams, as no setting makes them."""
