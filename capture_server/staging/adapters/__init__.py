"""Where each engine's worker payloads hold prompt ids, generation and extras."""
