"""What a run will cost before it starts: memory, time and traffic of each rank, and how sure that is."""
