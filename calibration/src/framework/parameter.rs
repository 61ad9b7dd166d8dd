//! Values of a table that are fitted, and of its hardware.

use narrows_cost_model::Profile;

use super::file::FrameworkTable;

/// A fitted value of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableParameter {
    /// Both directions of attention, by the same factor.
    Attention,
    /// The factor on GEMMs.
    Gemm,
    /// The factor on passes over memory.
    Memory,
    /// The factor on collectives.
    Collective,
    /// The host's time of an operator.
    Operator,
    /// The host's time of a block.
    Block,
    /// The time of a step outside its passes.
    Step,
    /// The fraction of the host's time that a further device of the tensor axis adds.
    Lockstep,
    /// The fraction of the network's bandwidth that collectives reach: a value of the hardware profile.
    Network,
    /// The device's time of an operator beyond its counted work.
    DeviceOperator,
}

impl TableParameter {
    /// All parameters with the names of the command line.
    pub const ALL: [(&'static str, TableParameter); 10] = [
        ("attention", TableParameter::Attention),
        ("gemm", TableParameter::Gemm),
        ("memory", TableParameter::Memory),
        ("collective", TableParameter::Collective),
        ("operator", TableParameter::Operator),
        ("block", TableParameter::Block),
        ("step", TableParameter::Step),
        ("lockstep", TableParameter::Lockstep),
        ("network", TableParameter::Network),
        ("device-operator", TableParameter::DeviceOperator),
    ];

    /// Multiplies the value by `factor`.
    pub(super) fn scale(self, fit: &mut Fit, factor: f64) {
        let table = &mut fit.table;
        match self {
            TableParameter::Attention => {
                table.attention.forward *= factor;
                table.attention.backward *= factor;
            }
            TableParameter::Gemm => table.factors.gemm *= factor,
            TableParameter::Memory => table.factors.memory *= factor,
            TableParameter::Collective => table.factors.collective *= factor,
            TableParameter::Operator => table.host.operator_s *= factor,
            TableParameter::Block => table.host.block_s *= factor,
            TableParameter::Step => table.host.step_s *= factor,
            TableParameter::Lockstep => table.host.lockstep *= factor,
            TableParameter::DeviceOperator => table.device.operator_s *= factor,
            TableParameter::Network => fit.scale_network(factor),
        }
    }
}

/// A table with fitted values, and the hardware.
#[derive(Clone)]
pub(super) struct Fit {
    /// The table.
    pub table: FrameworkTable,
    /// The hardware of all rows.
    pub profiles: Vec<Profile>,
}

/// Largest efficiency of the network: all-reduces of two to three nodes of eight A100s with four cards of 200 Gb/s reach
/// 86 to 96 of 100 GB/s (NVIDIA/nccl-tests, issues 119 and 175).
const NETWORK_EFFICIENCY_MAX: f64 = 0.96;

impl Fit {
    fn scale_network(&mut self, factor: f64) {
        for profile in &mut self.profiles {
            let mut file = profile.file().clone();
            let efficiency = &mut file.links.inter_node.efficiency;
            *efficiency = (*efficiency * factor).min(NETWORK_EFFICIENCY_MAX);
            // Efficiencies below the largest are valid.
            *profile = file.resolve().unwrap_or_else(|_| profile.clone());
        }
    }
}
