"""Show a fleet: replicas with their samples and pages, routing decisions with reasons, pages between two pools."""
