"""What users and april itself test with: a virtual clock, fake engines, fault scripts, conformance checks."""
