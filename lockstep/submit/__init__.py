"""`lockstep submit`: a run as a job of Slurm or of Kubernetes. Rendering needs no cluster. Nothing here loads torch.

Submission  →  slurm.script     →  sbatch
            →  kubernetes.manifests  →  kubectl apply
"""
