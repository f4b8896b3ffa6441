"""A folder of runs as a body of evidence: listed, compared, reported, reproduced."""
