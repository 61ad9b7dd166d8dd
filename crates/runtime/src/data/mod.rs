//! Token files: their format, memory-mapped reading, and seeded sampling.
