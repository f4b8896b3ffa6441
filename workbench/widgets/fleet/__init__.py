"""A fleet at work: replicas with their samples and pages, where requests went and why, pages between two pools."""
