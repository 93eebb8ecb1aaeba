"""Turns a run into a job of Slurm or of Kubernetes. Rendering needs no cluster, and nothing here loads torch.

Submission  →  slurm.script     →  sbatch
            →  kubernetes.manifests  →  kubectl apply
"""
