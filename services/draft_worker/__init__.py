"""The draft worker: proposes tokens, and says what each was sampled from."""
