"""Pipeline parallelism: stages of a model and their 1F1B schedule, independent of architectures."""
