"""The stage that trains or uses a model of the counts: optional, never on the default path."""
