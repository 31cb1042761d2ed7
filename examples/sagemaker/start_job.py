"""Starts a SageMaker training job with an image whose entry is `lockstep sagemaker`, and follows it until it ends.

    pip install boto3
    python examples/sagemaker/start_job.py --image URI --role ARN --input s3://bucket/my-run --output s3://bucket/jobs

Below --input are the folders config (a YAML file), train, and if you like validation, test and model.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

# What CloudWatch shows of the lines `metrics step=12 train:loss=1.25 ...`. The platform takes 40 at most.
NUMBER = r"([-+0-9.eE]+)"
METRICS = (
    *("train:loss", "train:grad_norm", "train:learning_rate", "train:tokens_per_s", "train:memory_gib", "train:epoch"),
    *("validation:loss", "train:margin", "train:reward", "validation:reward"),  # the last three: of DPO and GRPO
)
METRIC_DEFINITIONS = [{"Name": name, "Regex": f"{name}={NUMBER}"} for name in METRICS]


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True, help="of the Containerfile, in ECR")
    parser.add_argument("--role", required=True, help="ARN of the role that the job runs as")
    parser.add_argument("--input", required=True, help="s3:// folder with one folder for each channel")
    parser.add_argument("--output", required=True, help="s3:// folder for models and checkpoints")
    parser.add_argument("--channels", default="config,train", help="folders of --input, by commas")
    parser.add_argument("--name", default=f"lockstep-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--instance-type", default="ml.g5.xlarge")
    parser.add_argument("--instance-count", type=int, default=1)
    parser.add_argument("--volume-gb", type=int, default=100)
    parser.add_argument("--max-hours", type=float, default=24.0)
    parser.add_argument("--spot", action="store_true", help="cheaper machines that may be taken away; the job goes on")
    parser.add_argument("hyperparameters", nargs="*", metavar="KEY.PATH=VALUE", help="optim.epochs=2, for example")
    return parser.parse_args(arguments)


def make_request(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of CreateTrainingJob."""
    run_s = int(options.max_hours * 3600)
    waiting = {"MaxWaitTimeInSeconds": 2 * run_s} if options.spot else {}
    pairs = [pair.partition("=") for pair in options.hyperparameters]
    return {
        "TrainingJobName": options.name,
        "RoleArn": options.role,
        "AlgorithmSpecification": {
            "TrainingImage": options.image,
            "TrainingInputMode": "File",
            "MetricDefinitions": METRIC_DEFINITIONS,
        },
        "HyperParameters": {key: value for key, _, value in pairs},
        "InputDataConfig": [make_channel(name, f"{options.input}/{name}") for name in options.channels.split(",")],
        "OutputDataConfig": {"S3OutputPath": options.output},
        # One place for each run: a job that finds checkpoints there goes on with them.
        "CheckpointConfig": {"S3Uri": f"{options.output}/{options.name}/checkpoints"},
        "ResourceConfig": {
            "InstanceType": options.instance_type,
            "InstanceCount": options.instance_count,
            "VolumeSizeInGB": options.volume_gb,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": run_s, **waiting},
        "EnableManagedSpotTraining": options.spot,
    }


def make_channel(name: str, uri: str) -> dict[str, Any]:
    """Every host gets all of it: Lockstep shares out the rows itself."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def follow(client: Any, name: str) -> dict[str, Any]:
    shown = ""
    while True:
        job = client.describe_training_job(TrainingJobName=name)
        if job["SecondaryStatus"] != shown:
            shown = job["SecondaryStatus"]
            print(f"{name}: {shown}", flush=True)
        if job["TrainingJobStatus"] in ("Completed", "Failed", "Stopped"):
            return job
        time.sleep(20)


def main() -> None:
    import boto3

    options = read_arguments()
    client = boto3.client("sagemaker")
    client.create_training_job(**make_request(options))
    job = follow(client, options.name)
    if job["TrainingJobStatus"] != "Completed":
        raise SystemExit(f"{job['TrainingJobStatus']}: {job.get('FailureReason', 'no reason was given')}")
    print(json.dumps({"model": job["ModelArtifacts"]["S3ModelArtifacts"]}))


if __name__ == "__main__":
    main()
