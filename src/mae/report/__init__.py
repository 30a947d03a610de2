"""Pictures and plots that show honestly what was learned."""
